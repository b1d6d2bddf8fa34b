"""`batchinf tune`: runs a sample of a job's own rows under several settings and finds the fastest.

`candidates` has the settings that are tried, all of which leave the output as it is, `trial` runs one and keeps what it
measured, and `tune` joins the steps. `api` gives the function that runs a job. The replicas of a trial begin together,
once all engines are up, so that a short trial measures the speed of all of them.
"""
