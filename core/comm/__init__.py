"""Communication between processes: process groups, collectives, topology, and checks that all processes agree."""
