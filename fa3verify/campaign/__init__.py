"""Campaigns: tasks on any executor, resumable, to one summary, report and verdict."""
