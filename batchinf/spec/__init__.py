"""The job spec: its fields with their meaning, reading and checking of YAML files, and the reference text.

What a field's value leads to lives in the package that uses it.
"""
