"""Children as jobs of a Slurm cluster."""
