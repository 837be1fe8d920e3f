"""The suite ``methods``: Tables 2(a), 2(b) and Figure 3 of the paper, on this machine."""
