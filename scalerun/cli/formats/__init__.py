"""What ``scalerun.cli.convert`` reads and writes: a file for each library and direction."""
