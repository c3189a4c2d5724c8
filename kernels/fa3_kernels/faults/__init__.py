"""Planted mistakes: rewrites of the twin's source, run as packages of their own beside the sound one."""
