"""A run, its episodes and its skills in a browser: read-only over the files of run folders."""
