"""`batchinf tune`: runs samples of a job's own rows under several settings and finds the fastest.

`tune` joins the steps, and puts the winner into the spec. `candidates` makes the candidates, `search` decides which of
them run on how many rows, `trial` runs one and keeps what it measured, and `text` shows the result. Only settings that
leave the output as it is are tried. `api` gives the function that runs a job. The replicas of a trial begin together,
once all engines are up, so that a short trial measures the speed of all of them.
"""
