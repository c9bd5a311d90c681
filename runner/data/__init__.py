"""Dataloaders that are split over processes and continue from any position."""
