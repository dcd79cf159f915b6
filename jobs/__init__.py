"""Jobs, job files, runs, checkpoints and results, without torch and ray."""
