"""The input of a job as rows by position, whatever its files are, and the record of the files that were taken in.

Which of the rows run is decided in `job`; what a row becomes is decided in `prompts`.
"""
