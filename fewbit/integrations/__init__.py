"""Adapters for training frameworks, one file per framework."""
