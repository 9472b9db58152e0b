"""YAML for `shoal train`, composed by Hydra."""
