"""A replica that runs out of memory: how that is told, what its next start lowers, and what its user may do."""
