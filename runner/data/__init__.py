"""Dataloaders that are split over processes and resume from any position."""
