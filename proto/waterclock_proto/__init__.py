"""Events, codec, subjects and contract: all that Waterclock's services share."""
