"""What each kind of optimizer needs beside torch's interface."""
