#!/bin/sh
# The page for people.
printf 'Content-Type: text/html\r\n\r\n'
cat <<H
<!doctype html>
<title>$(hostname)</title>
<h1>Hello from $(hostname)</h1>
<p>Up for $(cut -d' ' -f1 /proc/uptime) seconds on Linux $(uname -r). <a href="/cgi-bin/info">All about this machine, as JSON</a>.</p>
<pre>
$(df -h /data 2>/dev/null | grep /data)
$(ip -o addr | awk '{print $2, $4}')
</pre>
H
