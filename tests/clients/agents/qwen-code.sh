export OPENAI_BASE_URL=http://127.0.0.1:8420/v1
export OPENAI_API_KEY=any
export OPENAI_MODEL=smollm2
