"""The API process: OpenAI over HTTP in front, tasks and tokens over Redis behind; no engine, no GPU."""
