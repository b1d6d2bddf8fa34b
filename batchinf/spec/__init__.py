"""The job spec: its fields with their meaning, how YAML files are read and checked, and the reference text."""
