"""Foundations that every package uses: errors, durable storage, fault points, stop signals, slices and short texts.

Nothing here knows what a job, a model or an engine is.
"""
