"""What every part of flextrain uses: errors, configuration, registries."""
