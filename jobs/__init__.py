"""Jobs, job files, the run folder, checkpoints and results. Imports neither torch nor ray."""
