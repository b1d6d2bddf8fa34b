"""Tasks `embed`, `classify`, `reward` and `hidden_states`: vectors of prompts; and `rerank`: scores of documents."""
