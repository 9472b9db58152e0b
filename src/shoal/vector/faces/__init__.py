"""Vector environments with the interfaces of other libraries; each is a thin layer over `make_vec`."""
