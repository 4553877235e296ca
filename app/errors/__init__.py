"""What can go wrong with a request, as one tree.

Every error knows the HTTP status, the OpenAI `code`, and whether a client may try again, so that a stage, the router
and the API raise the same classes and the edge needs no table.
"""
