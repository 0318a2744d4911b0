"""How clients speak: what they send and read, translated to calls and answers of the model."""
