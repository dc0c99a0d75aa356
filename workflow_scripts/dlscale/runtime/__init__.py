"""Configuration, files, logging, provenance and fingerprints: what every stage stands on."""
