"""What the stages tell each other: JSON, validated on arrival, references and no tensors.

Tasks travel as Celery keyword arguments (pydantic); token deltas, thousands a second, as msgspec structs.
"""
