"""Configs of other trainers as ours: `titanlite import-config`."""
