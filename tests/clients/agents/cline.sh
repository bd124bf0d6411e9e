cline auth --provider openai --apikey any --modelid smollm2 --baseurl http://127.0.0.1:8420/v1
