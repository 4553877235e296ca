"""The stages of a request, one file each. A stage knows its message and the host, and no other stage."""
