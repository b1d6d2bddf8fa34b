"""Writes the output of a job in other formats: its rows in the order of the input, in bounded memory."""
