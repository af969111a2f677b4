"""The processes of one TP group: the leader's steps reach its members."""
