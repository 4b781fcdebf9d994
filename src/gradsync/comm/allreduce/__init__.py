"""All-reduce algorithms made of sends and receives, and the selection of one by the tensor's size."""
