"""Settings: dataclasses, flags, YAML."""
