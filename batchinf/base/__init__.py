"""Foundations that every package uses: errors, durable storage, fault points, stop signals, slices and short texts."""
