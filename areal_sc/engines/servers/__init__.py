"""Generation by inference servers, of whatever kind: started, watched, fed with weights, asked."""
