"""`headway plan`: will it fit, how fast will it be, which schedule to choose; joins `plan` with the real scheduler."""
