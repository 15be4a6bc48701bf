"""Real clients, each in an environment of its own, against the gateway and Triton: `scripts/interop`.

Each file of clients/ is a program: the addresses and the names of the models in (JSON, its one argument), one line of
JSON out: {"checks": {NAME: "passed" or the reason of a failure}}. They import nothing of this project.
"""

CLIENTS: dict[str, tuple[str, ...]] = {  # file of clients/ -> its packages, the client itself first
    "openai": ("openai==3.4.0",),
    "cohere": ("cohere==7.3.0",),
    "langchain": ("langchain-openai==1.7.3", "langchain-cohere==0.6.0", "langchain-tests==1.1.9", "pytest-asyncio"),
    "llama_index": (
        "llama-index-llms-openai-like==0.8.1",
        "llama-index-embeddings-openai-like",
        "llama-index-postprocessor-cohere-rerank==0.10.0",
        "llama-index-postprocessor-jinaai-rerank==0.6.0",
        "llama-index-postprocessor-tei-rerank==0.6.0",
    ),
    "voyage": ("voyageai==0.5.0",),
    "milvus": ("pymilvus.model==0.3.4", "pymilvus==3.0.2", "openai==3.4.0", "cohere==7.3.0"),
    "litellm": ("litellm==1.106.2",),
    "lm_eval": ("lm-eval[api]==0.4.13", "transformers==5.23.0"),
    "aiperf": ("aiperf==0.13.0",),
    "guidellm": ("guidellm==0.8.1", "torch==2.13.0"),
    "dynamo": ("ai-dynamo==1.6.1", "tritonclient[grpc]==2.73.0"),
}
