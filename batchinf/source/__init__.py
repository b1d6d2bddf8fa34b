"""The input of a job: its files in any format as rows by position, and the record of which files the job has."""
