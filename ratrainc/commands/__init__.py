"""The commands of `ratrainc`, one file each; every one exposes `command`."""
