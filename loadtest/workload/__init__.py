"""The processes beside a server that several benchmarks start, each with a core or more to itself.

children    starts them: a trainer that publishes, clients that stream
publisher   holds weights in memory, as a trainer does, and publishes them when told
streams     clients that ask again and again, and when each token reached them
checker     clients that check every token against the version that wrote it
stock_vllm  a server of stock vLLM, and its own way to change weights
"""
