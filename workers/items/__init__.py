"""Items of prompts: encoded here, found elsewhere, and put into prompts."""
