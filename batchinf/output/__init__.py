"""The output of a job: journal segments, Parquet parts, their counts, and the check of committed parts."""
