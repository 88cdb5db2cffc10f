module sluice.dev/bed/init

go 1.26.8
