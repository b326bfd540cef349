"""What a run shows: metrics, progress, report, plot, and what the machine offers."""
