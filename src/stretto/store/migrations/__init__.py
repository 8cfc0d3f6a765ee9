"""How the tables came to be, one file each step. `stretto.store.migrating` runs what is missing."""
