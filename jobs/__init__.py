"""What a job is, reading job files, the run folder, checkpoints and results. Imports neither torch nor ray."""
