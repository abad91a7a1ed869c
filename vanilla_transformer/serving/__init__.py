"""Servers of models for people and programs."""
