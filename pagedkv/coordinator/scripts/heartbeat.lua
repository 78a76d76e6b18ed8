-- Renew the lease.

local refusal = fenced()
if refusal then return refusal end
renew()
return reply("ok")
