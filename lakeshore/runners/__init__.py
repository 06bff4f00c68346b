"""Where a child runs: as a process, in a container, as a Slurm job, as a Kubernetes Job."""
