"""Converts configs of other trainers: `titanlite import-config`."""
