export AIDER_OPENAI_API_BASE=http://127.0.0.1:8420/v1
export AIDER_OPENAI_API_KEY=any
export AIDER_MODEL=openai/smollm2
